// Package compose replaces the one of testcontainers that confluent-kafka-go's tests import. They call it only to
// start servers through Docker, which needs hundreds of modules and never happens here: the server under test is
// already running.
package compose

import "errors"

// LocalDockerCompose cannot start anything.
type LocalDockerCompose struct{}

// ExecError is the reason why nothing was started.
type ExecError struct {
	Error error
}

// NewLocalDockerCompose has the parameters of the real one.
func NewLocalDockerCompose([]string, string) *LocalDockerCompose {
	return &LocalDockerCompose{}
}

// WithCommand takes the command for Invoke.
func (compose *LocalDockerCompose) WithCommand([]string) *LocalDockerCompose {
	return compose
}

// Invoke fails.
func (*LocalDockerCompose) Invoke() ExecError {
	return ExecError{errors.New("the tests are built without Docker")}
}

// Down has nothing to stop.
func (*LocalDockerCompose) Down() {}
