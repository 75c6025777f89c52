"""The learner as its daemon has it: the socket, who may attach, where it stands, what is offered to it."""
