"""All waits and time limits of the client, in seconds."""

RETRY_S = 0.5  # wait before the first retry; each further retry waits twice as long
LOOK_S = 0.5  # wait between two health checks of a server that is not healthy yet
SCRAPE_S = 0.05  # wait between two readings of counters that lag behind the answers
END_S = 2.0  # after a failed request, how long to wait to see whether the server has ended
SHORT_S = 10.0  # time limit for a request that does not run the model
