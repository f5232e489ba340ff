"""Builds the launch table of a program: its launches, the values between them, and what each launch computes."""
