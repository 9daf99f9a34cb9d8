"""The controller on another machine: moved there, brought back, adopted; what it is asked for."""
