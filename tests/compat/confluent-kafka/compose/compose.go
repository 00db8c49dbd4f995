// Package compose stands in for the one of testcontainers that confluent-kafka-go's tests are compiled with. They call it only when they
// are told to start servers by Docker, which needs hundreds of modules, and never happens here: the server under test is there already.
package compose

import "errors"

// LocalDockerCompose cannot start anything.
type LocalDockerCompose struct{}

// ExecError is why nothing was started.
type ExecError struct {
	Error error
}

// NewLocalDockerCompose takes what the real one takes.
func NewLocalDockerCompose([]string, string) *LocalDockerCompose {
	return &LocalDockerCompose{}
}

// WithCommand takes the command that Invoke is to run.
func (compose *LocalDockerCompose) WithCommand([]string) *LocalDockerCompose {
	return compose
}

// Invoke fails.
func (*LocalDockerCompose) Invoke() ExecError {
	return ExecError{errors.New("the tests are built without Docker")}
}

// Down has nothing to stop.
func (*LocalDockerCompose) Down() {}
