"""`ik study`: what each tensor of a model costs in each type, measured on the resident model."""
