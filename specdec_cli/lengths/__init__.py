"""Length policies, a file each: how many tokens a round proposes."""
