"""Training of EAGLE and MTP heads and drafters of blocks for a target that is there.

`texts` reads conversations and has the target answer questions; `rows` cuts their tokens; `states`
keeps the target's states of them; `heads` makes and saves a head; `unrolled` is its loss, and what
is reported of it; `steps` optimises; and `session` is the whole, which can be stopped and resumed.
"""
