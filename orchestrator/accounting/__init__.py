"""What a job was worth: folds over (event, effects) that live, simulated and replayed jobs share."""
