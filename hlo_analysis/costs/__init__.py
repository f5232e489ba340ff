"""Costs of a launch: FLOPs, HBM traffic, registers and shared memory, roofline time, and a program's memory."""
