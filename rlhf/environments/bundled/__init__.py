"""The environments that come with the package: `env=guess` and `env=calculator`."""
