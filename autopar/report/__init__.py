"""What a plan says, as rows of plain numbers and words, and how they are printed."""
