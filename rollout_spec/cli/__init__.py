"""The command `rollout-spec`, one file a subcommand."""
