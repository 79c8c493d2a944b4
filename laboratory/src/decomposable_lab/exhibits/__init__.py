"""Every figure and table of the paper by its name: what is trained for it, what is measured, and which claims hold.

shown.py         what an exhibit consists of once it is measured: figures, tables, claims with verdicts
scales.py        what is trained for it: at the paper's scale, and at one that fits a laptop
context.py       the trained networks, data and curves that a measurement sees
ablations.py     figures 2a to 2f, appendices A and "channel"
verdicts.py      when one method counts as better than another
comparisons.py   figures 3a to 3c, table 1
costs.py         table 2, section 4.4
beyond.py        what goes beyond the paper
theory.py        propositions 1 and 2, appendix E
catalogue.py     all of them, by name
running.py       train what is missing, measure, and keep what came out
"""
