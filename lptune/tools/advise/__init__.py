"""Which kind of precision is fastest for this model on this device, and what does it cost?

measure.py     times the linear layers of a model in each kind, by groups that read one input, and the rest of
               the step once
from_times.py  from these times to a step of each kind, a ranking and a recommendation
quality.py     the loss of each kind before any training: measured here, or of a published model
report.py      the text
answer.py      all of it in one call; for a GPU that is not here, by lptune/plan/from_counts.py
"""
