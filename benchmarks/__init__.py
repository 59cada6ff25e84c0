"""What speed, memory and learning are, measured: each module is a program that prints what it saw."""
