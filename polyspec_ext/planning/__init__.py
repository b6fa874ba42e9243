"""Which chain of the models at hand decodes one's prompts fastest on this machine (`ps.plan`).

Plans lie above `Chain`: chains are made and run here to be timed."""
