"""What the course notebooks show that is too long for a cell: small functions, one file per subject."""
