"""The ``deadpool`` command. Nobody imports it; each subcommand is loaded only when it is called."""
