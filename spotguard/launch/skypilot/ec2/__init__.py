"""What EC2 itself says of the instances behind a cluster of SkyPilot's."""
