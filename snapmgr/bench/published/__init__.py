"""The published experiments: their figures, the original script, and how our results agree with them.

`judgement` compares samples with `figures`; `script` is the script that random-update repeats.
"""
