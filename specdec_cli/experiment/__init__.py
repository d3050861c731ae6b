"""What is measured, kept and concluded; knows no terminal."""
