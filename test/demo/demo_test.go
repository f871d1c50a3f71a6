package main_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
)

// patience is for a loaded computer, on which the Kubernetes components may have to be built first.
const patience = 10 * time.Minute

// executable is the demo, built once, beside talos-ccm.
var executable string

func TestMain(m *testing.M) {
	code, err := buildAndRun(m)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)

		code = 1
	}

	os.Exit(code)
}

func buildAndRun(m *testing.M) (int, error) {
	folder, err := os.MkdirTemp("", "talos-ccm-demo-test-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(folder) //nolint:errcheck // temporary

	executable = filepath.Join(folder, "demo")

	if output, err := exec.Command("go", "build", "-o", folder+"/", ".", "../../cmd/talos-ccm").CombinedOutput(); err != nil {
		return 0, fmt.Errorf("build the demo: %w\n%s", err, output)
	}

	return m.Run(), nil
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
		if !strings.Contains(d.output.String(), line) {
			t.Errorf("output lacks %q", line)
		}
	}

	// The table is the last.
	for _, row := range [][]string{
		{"metal-1 (control plane)", " talos://metal/4c4c4544-", " on-demand ", " 198.18.0.1,fd00:7a10:5::1 ", " 10.192.", "  issued"},
		{"aws-2 (late)", " aws:///eu-central-1a/i-", " eu-central-1a ", " spot ", " 198.18.0.2 ", " 203.0.113.2 ", " 10.192.", "  issued"},
		{"hcloud-3 (slow)", " hcloud://48150002 ", " fsn1-dc14 ", " on-demand ", " 198.18.0.3 ", " 203.0.113.3 ", " 10.192.", "  issued"},
		{"nocloud-4 ", " talos://nocloud/103 ", " pve-1 ", " spot ", " 198.18.0.4 ", " 203.0.113.250,203.0.113.4 ", " 10.192.", "  issued"},
		{"gcp-5 (reset)", " deleted ", "-"},
	} {
		d.expectRow(row...)
	}

	d.expectNoProcesses()
	d.expectNoFiles()
}

func TestDemo_KeepsClusterUntilInterrupted(t *testing.T) {
	t.Parallel()

	d := start(t, "-nodes", "1", "-keep")
	kubeconfig := strings.TrimPrefix(d.awaitLine("export KUBECONFIG="), "  export KUBECONFIG=")

	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		t.Fatal(err)
	}

	if _, err := kubernetes.NewForConfigOrDie(config).CoreV1().Nodes().Get(t.Context(), "metal-1", metav1.GetOptions{}); err != nil {
		t.Error(err)
	}

	d.signal(syscall.SIGINT)
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
			d.signal(syscall.SIGINT)
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

	if len(d.processes()) == 0 {
		t.Error("no child process found while the demo runs: the search is broken")
	}

	d.signal(syscall.SIGKILL)
	d.expectExit(-1)
	d.expectNoProcesses()
}

func TestDemo_ExplainsInvalidArguments(t *testing.T) {
	t.Parallel()

	const explanation = "number of simulated Talos machines, 1 to 5000 (default 20)"

	for _, args := range []string{"-nodes 0", "-nodes 5001", "-nodes abc", "-knoten 20", "20"} {
		t.Run(args, func(t *testing.T) {
			t.Parallel()

			d := start(t, strings.Fields(args)...)
			d.expectExit(2)

			if !strings.Contains(d.errors.String(), explanation) {
				t.Errorf("got %q, want %q", d.errors.String(), explanation)
			}
		})
	}
}

// demo is a running demo. It and its children are known by the folder for temporary files, which is theirs alone and in the command
// line of each child.
type demo struct {
	t       *testing.T
	cmd     *exec.Cmd
	folder  string
	lines   *bufio.Scanner
	output  bytes.Buffer
	errors  bytes.Buffer
	expires context.Context //nolint:containedctx // bounds every wait of the test
}

func start(t *testing.T, args ...string) *demo {
	t.Helper()

	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)

	// t.TempDir has the test's name in it, and the path of a socket must not be long.
	folder, err := os.MkdirTemp("", "talos-ccm-demo-test-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}

	t.Cleanup(func() { _ = os.RemoveAll(folder) }) //nolint:errcheck // temporary

	d := &demo{t: t, cmd: exec.CommandContext(ctx, executable, args...), folder: folder, expires: ctx}
	d.cmd.Env = append(os.Environ(), "TMPDIR="+d.folder)
	d.cmd.Stderr = &d.errors

	output, err := d.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}

	d.lines = bufio.NewScanner(output)

	if err := d.cmd.Start(); err != nil {
		t.Fatal(err)
	}

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

	_ = d.cmd.Wait() //nolint:errcheck // whatever it ended with, it was too early
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

func (d *demo) signal(signal os.Signal) {
	d.t.Helper()

	if err := d.cmd.Process.Signal(signal); err != nil {
		d.t.Fatal(err)
	}
}

// expectExit waits for the end. A demo that was killed has status -1.
func (d *demo) expectExit(status int) {
	d.t.Helper()

	for d.lines.Scan() {
		d.output.WriteString(d.lines.Text() + "\n")
	}

	err := d.cmd.Wait()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		d.t.Fatal(err)
	}

	if got := d.cmd.ProcessState.ExitCode(); got != status {
		d.t.Fatalf("exit status %d, want %d", got, status)
	}
}

// expectNoProcesses waits until the kernel has ended the children; those of a demo that was not killed are gone before it.
func (d *demo) expectNoProcesses() {
	d.t.Helper()

	const (
		poll  = 20 * time.Millisecond
		limit = time.Minute
	)

	err := wait.PollUntilContextTimeout(d.expires, poll, limit, true, func(context.Context) (bool, error) {
		return len(d.processes()) == 0, nil
	})
	if err != nil {
		d.t.Errorf("processes left: %q", d.processes())
	}
}

// processes are the command lines of this demo's children.
func (d *demo) processes() []string {
	d.t.Helper()

	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		d.t.Fatal(err)
	}

	var found []string

	for _, file := range files {
		// A process that has just ended has no command line.
		if line, err := os.ReadFile(file); err == nil && bytes.Contains(line, []byte(d.folder+"/")) {
			found = append(found, string(bytes.ReplaceAll(line, []byte{0}, []byte{' '})))
		}
	}

	return found
}

func (d *demo) expectNoFiles() {
	d.t.Helper()

	entries, err := os.ReadDir(d.folder)
	if err != nil {
		d.t.Fatal(err)
	}

	if len(entries) > 0 {
		d.t.Errorf("temporary files left: %v", entries)
	}
}
