"""The version of mmtrain, for those below the package itself."""

VERSION = "0.1.0"
