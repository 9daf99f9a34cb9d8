"""The controller at work: it looks, decides, acts and writes down."""
