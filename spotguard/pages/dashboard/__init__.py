"""The live pages: a server on loopback that only who has its token may ask."""
