"""The record of a job: what happened and what was decided, one line per step, readable by people and by replay."""
