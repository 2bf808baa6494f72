"""What runs in a step: the plan, its result and the scheduler that makes one from the other. Torch-free."""
