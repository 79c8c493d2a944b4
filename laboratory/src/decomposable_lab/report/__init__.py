"""One self-contained page of what was measured: exhibits of the paper, their claims, and single runs.

finding.py    the records below a folder, each checked as what a stranger could have written
sections.py   a section of the page for each exhibit, runs.py for a single run
trainings.py  what was trained for an exhibit, by network
verdicts.py   words and signs for what holds; links to other exhibits
header.py     the counts and the overview
page.py       sections → HTML, with styles (page.css), behaviour (page.js) and the plotting library inside
"""
