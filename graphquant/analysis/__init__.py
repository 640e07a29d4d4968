"""Analysis of models and plans: comparison with the float model, differences, explanations, summaries and reports."""
