package main_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/talos-ccm/talos-ccm/test/builder"
)

// timeout is for a loaded computer, on which the Kubernetes components may have to be built first.
const timeout = 10 * time.Minute

// dir contains the executables of the demo and of talos-ccm.
var dir string

func TestMain(m *testing.M) {
	var err error
	if dir, err = os.MkdirTemp("", "talos-ccm-demo-test-"); err == nil {
		err = errors.Join(builder.Executable(".", dir+"/demo"), builder.Executable("../../cmd/talos-ccm", dir+"/talos-ccm"))
	}

	if err != nil {
		panic(err)
	}

	code := m.Run()
	_ = os.RemoveAll(dir) //nolint:errcheck // temporary

	os.Exit(code)
}

func TestDemo_ShowsEachFeature(t *testing.T) {
	t.Parallel()

	d := start(t, "-nodes", "5")
	d.expectExit(0)

	for _, line := range []string{
		"example.org/spot: '{{ .InstanceType }}:PreferNoSchedule'",
		"hcloud-3 (slow) responds to every call after 2s",
		"Log of talos-ccm",
		"waiting for initialization: aws-2 (late): MetadataPending",
		"5 of 5 Nodes are initialized",
		"capacity     on-demand → spot after",
		"address      203.0.113.250 added after",
		"certificate  with the added address, issued",
		"the kubelet of nocloud-4 requests a serving certificate for the name and address of metal-1",
		`OwnedByOtherMachine: DNS name "metal-1" is owned by Node "metal-1"`,
		"Service web of class talos-ccm.dev/node-ip got the addresses of the ready Nodes aws-2, hcloud-3, nocloud-4 after",
		"NodeGone: Machine is gone: ",
		"Node gcp-5 was deleted after",
	} {
		assert.Contains(t, d.output.String(), line)
	}

	// The table is the last.
	for _, row := range [][]string{
		{"metal-1 (control plane)", " talos://metal/4c4c4544-", " on-demand ", " 127.", ",fd00:7a10:5::1 ", " 10.192.", "  issued"},
		{"aws-2 (late)", " aws:///eu-central-1a/i-", " eu-central-1a ", " spot ", " 127.", ",fd00:7a10:5::2 ", " 203.0.113.2 ", " 10.192.", "  issued"},
		{"hcloud-3 (slow)", " hcloud://48150002 ", " fsn1-dc14 ", " on-demand ", " 127.", ",fd00:7a10:5::3 ", " 203.0.113.3 ", " 10.192.", "  issued"},
		{"nocloud-4 ", " talos://nocloud/103 ", " pve-1 ", " spot ", " 127.", ",fd00:7a10:5::4 ", " 203.0.113.250,203.0.113.4 ", " 10.192.", "  issued"},
		{"gcp-5 (reset)", " deleted ", "-"},
	} {
		d.expectRow(row...)
	}

	d.expectNoProcesses()
	d.expectNoFiles()
}

func TestDemo_KeepsClusterUntilInterrupted(t *testing.T) {
	t.Parallel()

	d := start(t, "-nodes", "3", "-keep")
	environment := strings.Fields(d.awaitLine("export KUBECONFIG="))[1:]

	config, err := clientcmd.BuildConfigFromFlags("", strings.TrimPrefix(environment[0], "KUBECONFIG="))
	require.NoError(t, err)

	nodes, err := kubernetes.NewForConfigOrDie(config).CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	assert.Len(t, nodes.Items, 3)

	for _, node := range nodes.Items {
		ready := node.Status.Conditions[len(node.Status.Conditions)-1]
		assert.Equal(t, []string{"Ready", "True", "KubeletReady"}, []string{string(ready.Type), string(ready.Status), ready.Reason}, node.Name)
	}

	for _, command := range []struct{ name, output string }{
		{" diff ", "3 Nodes: 0 would change, 3 would not, 0 cannot be compared"},
		{" render ", "example.org/capacity"},
	} {
		args := strings.Fields(d.awaitLine(command.name))
		cmd := exec.CommandContext(t.Context(), args[0], args[1:]...)
		cmd.Env = append(os.Environ(), environment...)

		output, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s\n%s", args, output)
		assert.Contains(t, string(output), command.output)
	}

	require.NoError(t, d.cmd.Process.Signal(syscall.SIGINT))
	d.expectExit(0)
	d.expectRow("metal-1 (control plane)", "  issued")
	d.expectNoProcesses()
	d.expectNoFiles()
}

func TestDemo_CleansUpWhenInterrupted(t *testing.T) {
	t.Parallel()

	for name, moment := range map[string]string{
		"while talos-ccm starts":  "Talos machines up",
		"while nodes are pending": "waiting for ",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			d := start(t, "-nodes", "4")
			d.awaitLine(moment)
			require.NoError(t, d.cmd.Process.Signal(syscall.SIGINT))
			d.expectExit(130)
			d.expectNoProcesses()
			d.expectNoFiles()
		})
	}
}

func TestDemo_ChildrenExitWhenKilled(t *testing.T) {
	t.Parallel()

	d := start(t, "-nodes", "4")
	d.awaitLine("became leader after")

	assert.NotEmpty(t, d.processes(), "no child process found while the demo runs: the search is broken")
	require.NoError(t, d.cmd.Process.Kill())
	d.expectExit(-1)
	d.expectNoProcesses()
	d.expectNoFiles()
}

func TestDemo_ExplainsInvalidArguments(t *testing.T) {
	t.Parallel()

	const explanation = "number of simulated Talos machines, 1 to 5000 (default 20)"

	for _, args := range []string{"-nodes 0", "-nodes 5001", "-nodes abc", "-knoten 20", "20"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()

			d := start(t, strings.Fields(args)...)
			d.expectExit(2)

			assert.Contains(t, d.errors.String(), explanation)
		})
	}
}

// demo is a running demo. The command lines of its children contain its directory for temporary files.
type demo struct {
	t      *testing.T
	cmd    *exec.Cmd
	dir    string
	lines  *bufio.Scanner
	output bytes.Buffer
	errors bytes.Buffer
}

func start(t *testing.T, args ...string) *demo {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)

	// t.TempDir has the test's name in it, and the path of a socket must not be long.
	temporary, err := os.MkdirTemp("", "talos-ccm-demo-test-") //nolint:usetesting // see above
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(temporary) }) //nolint:errcheck // temporary

	d := &demo{t: t, cmd: exec.CommandContext(ctx, dir+"/demo", args...), dir: temporary}
	d.cmd.Env = append(os.Environ(), "TMPDIR="+temporary)
	d.cmd.Stderr = &d.errors

	output, err := d.cmd.StdoutPipe()
	require.NoError(t, err)

	d.lines = bufio.NewScanner(output)

	require.NoError(t, d.cmd.Start())
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("output:\n%s%s", d.output.String(), d.errors.String())
		}
	})

	return d
}

// awaitLine reads the output until a line contains text, and returns that line.
func (d *demo) awaitLine(text string) string {
	d.t.Helper()

	for d.lines.Scan() {
		d.output.WriteString(d.lines.Text() + "\n")

		if strings.Contains(d.lines.Text(), text) {
			return d.lines.Text()
		}
	}

	_ = d.cmd.Wait() //nolint:errcheck // it has ended too early in any case
	d.t.Fatalf("exited without printing %q", text)

	return ""
}

// expectRow looks for a line that begins with the first of the parts, ends with the last, and has the others.
func (d *demo) expectRow(parts ...string) {
	d.t.Helper()

	for line := range strings.Lines(d.output.String()) {
		line = strings.TrimSuffix(line, "\n")
		missing := func(part string) bool { return !strings.Contains(line, part) }

		if strings.HasPrefix(line, parts[0]) && strings.HasSuffix(line, parts[len(parts)-1]) && !slices.ContainsFunc(parts, missing) {
			return
		}
	}

	d.t.Errorf("no line contains %q", parts)
}

// expectExit waits for the end. A demo that was killed has status -1.
func (d *demo) expectExit(status int) {
	d.t.Helper()

	for d.lines.Scan() {
		d.output.WriteString(d.lines.Text() + "\n")
	}

	err := d.cmd.Wait()
	if exit := (*exec.ExitError)(nil); !errors.As(err, &exit) {
		require.NoError(d.t, err)
	}

	require.Equal(d.t, status, d.cmd.ProcessState.ExitCode(), "exit status")
}

// expectNoProcesses waits until the kernel has killed the children. A demo that was not killed stops them before it exits.
func (d *demo) expectNoProcesses() {
	d.t.Helper()
	require.EventuallyWithT(d.t, func(c *assert.CollectT) { assert.Empty(c, d.processes()) }, time.Minute, 20*time.Millisecond)
}

// processes returns the command lines of this demo's children.
func (d *demo) processes() (found []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")

	for _, file := range files {
		// A process that has just ended has no command line.
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(d.dir+"/")) {
			found = append(found, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}

	return found
}

func (d *demo) expectNoFiles() {
	d.t.Helper()

	entries, err := os.ReadDir(d.dir)
	require.NoError(d.t, err)
	assert.Empty(d.t, entries, "temporary files left")
}
