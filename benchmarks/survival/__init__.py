"""The survival matrix: how often an interrupted job ends saved and complete."""
