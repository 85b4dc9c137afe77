"""The accounts of a job: folds over (event, effects) that live, simulated and replayed jobs share."""
