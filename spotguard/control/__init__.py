"""The controller: journal, state machine, spend meter, and what commands ask of them."""
