"""From a recipe to a trained network: one plain loop for every method, resumable, with everything in one folder."""
