"""What happens once per step: host block tables, planning, and the choice of a CUDA graph."""
