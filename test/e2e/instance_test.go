//go:build e2e

package e2e_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// instance is a talos-ccm process on the host, in the network of the machines. It is a second candidate for the lease.
type instance struct {
	dir   string
	ended chan struct{}
	// err is the result of the process. It is valid after ended is closed.
	err error
}

// startInstance starts an instance of the first version with upgradeRules, and waits until it is a candidate for the lease.
func startInstance(t *testing.T) *instance {
	t.Helper()

	i := &instance{dir: t.TempDir(), ended: make(chan struct{})}

	for name, content := range map[string][]byte{"kubeconfig": bed.Kubeconfig(), "config.yaml": []byte(upgradeRules)} {
		require.NoError(t, os.WriteFile(filepath.Join(i.dir, name), content, 0o600))
	}

	// The long lease keeps the instance running without an API server, and the short retry period lets it acquire the lease
	// before the extension, which starts with the API server. Variables of the environment would set flags.
	script := fmt.Sprintf(`cd %s && echo $$ > pid && exec env -i %s --talosconfig=$TALOSCONFIG --kubeconfig=kubeconfig --cloud-config=config.yaml \
		--leader-elect-lease-duration=5m --leader-elect-renew-deadline=4m --leader-elect-retry-period=500ms 2> log`, i.dir, binaryPath())

	ctx, kill := context.WithCancel(context.WithoutCancel(t.Context()))

	go func() {
		defer close(i.ended)

		_, i.err = bed.Shell(ctx, script)
	}()

	t.Cleanup(func() {
		kill()
		<-i.ended
	})

	eventually(t, func(context.Context) error {
		if log := i.log(); !strings.Contains(log, "leader lease") {
			return fmt.Errorf("the other instance is not waiting for the lease:\n%s", log)
		}

		return nil
	})

	return i
}

// log returns the log of the instance, or the error to read it.
func (i *instance) log() string {
	log, err := os.ReadFile(filepath.Join(i.dir, "log"))
	if err != nil {
		return err.Error()
	}

	return string(log)
}

// stop terminates the instance, and requires that it succeeds.
func (i *instance) stop(t *testing.T) {
	t.Helper()

	text, err := os.ReadFile(filepath.Join(i.dir, "pid"))
	require.NoError(t, err)

	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)

	require.NoError(t, syscall.Kill(pid, syscall.SIGTERM))

	<-i.ended
	assert.NoError(t, i.err, i.log())
}
