"""Several methods under one protocol: what is missing is trained, what is there is read, and one figure shows them all.

parts.py      what is to be trained, checked, in an order in which everything comes after what it needs
running.py    train what is missing, then gather the records
scheduling.py one training after the other, or some side by side in processes
watching.py   what is shown of them, and about how long they still take
results.py    all records in the folder → the curves of every method, their mean and spread over the seeds
estimate.py   about how long it takes, from a few steps of each method
figure.py     accuracy over size as a picture
captions.py   what a figure says in words: its title, who is who
stepping.py   one training step of a method, to be timed
explorer.py   the sizes of a network for a slider: MACs, parameters, accuracy and the rank of every layer
on_ray.py     the same on a Ray cluster
sharding.py   a share of the trainings, where several machines write into one folder
"""
