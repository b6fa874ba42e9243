"""Which chain of the models at hand decodes the user's prompts fastest on this machine (`ps.plan`).

Plans lie above `Chain`: chains are made and run here to be timed."""
