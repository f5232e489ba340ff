"""Query, key and value projections of one input in one launch, with the norm before and the rotary embedding after."""
