"""Choice of the chain that decodes the user's prompts fastest on this machine (`ps.plan`).

Plans are a layer above `Chain`: they build and run chains to time them."""
