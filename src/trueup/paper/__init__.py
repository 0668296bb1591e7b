"""The paper's numbers (tables.json), and a recipe for each of its tables and figures (one YAML file each)."""
