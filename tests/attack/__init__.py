"""The attack, kept: a file for each subject; README.md has a row for each finding."""
