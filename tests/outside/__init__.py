"""A package that adds an operation and an architecture to ik from outside, as CONTRIBUTING.md says."""
