"""The waits of the client, in seconds, in one place."""

RETRY_S = 0.5  # wait before the first retry; each further retry waits twice as long
LOOK_S = 0.5  # wait between two looks at a server that is not healthy yet
SCRAPE_S = 0.05  # wait between two readings of counters that lag behind
END_S = 2.0  # time limit for noticing that a silent server has ended
SHORT_S = 10.0  # limit for an answer that needs no model
