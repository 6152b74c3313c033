"""Small faults put into the source one at a time: whether the tests notice them (`make mutants`)."""
