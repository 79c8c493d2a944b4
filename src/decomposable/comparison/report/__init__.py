"""One self-contained page of what was measured: exhibits of the paper, their claims, and single runs.

finding.py    the records below a folder, each checked as what a stranger could have written
explorer.py   the sizes of a network for the page's slider: MACs, parameters, accuracy and the rank of every layer
page.py       records → HTML, with styles (page.css), behaviour (page.js) and the plotting library inside
"""
