"""One HTML file on one or several runs, from what is in their folders: for a person, without torch and a network."""
