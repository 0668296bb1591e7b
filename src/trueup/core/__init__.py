"""The contract of a method and the one flow that runs it; knows torch only."""
