"""What people see on a terminal; computes nothing."""
