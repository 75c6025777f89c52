"""Pure decisions: facts in, commands out. No clock, socket, file, thread, environment or logging in here."""
