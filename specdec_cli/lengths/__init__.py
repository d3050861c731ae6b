"""Length policies, a file each. A policy chooses the number of tokens that a round proposes."""
