"""Length policies, one per file. A policy chooses the number of tokens that a round proposes."""
