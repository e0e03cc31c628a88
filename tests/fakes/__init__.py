"""Stand-ins that several rooms test against."""
