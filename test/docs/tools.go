package docs

import (
	"fmt"
	"strings"
)

// Kinds of flags that take a value.
const (
	takesValue = "="
	readsFile  = "<"
	makesFile  = ">"
	takesPatch = "@"
)

// flags maps the flags of a command to their kinds.
type flags map[string]string

// flagList parses a list of flags. The last character of each word is the flag's kind; a kind without a name is that of arguments.
func flagList(list string) flags {
	f := flags{}

	for word := range strings.FieldsSeq(list) {
		name := strings.TrimRight(word, takesValue+readsFile+makesFile+takesPatch)
		f[name] = word[len(name):]
	}

	return f
}

// tool is a program with its subcommands and their flags; "" is the program itself.
type tool struct {
	// global has the flags that all subcommands accept.
	global   flags
	commands map[string]flags
	// inner is the program in the image, for programs that run images.
	inner string
}

// call is a parsed command line.
type call struct {
	command                  string
	inputs, outputs, patches []string
	// inner has the arguments of the program in the image.
	inner []string
}

// parse parses args and returns an error for unknown flags and subcommands.
func (t tool) parse(args []string) (call, error) {
	var (
		c           call
		positionals []string
	)

	for i := 0; i < len(args) && args[i] != "--"; i++ {
		if strings.HasPrefix(args[i], "-") && args[i] != "-" {
			taken, err := t.flag(&c, args[i:])
			if err != nil {
				return c, err
			}

			i += taken

			continue
		}

		positionals = append(positionals, args[i])
		c.command = t.command(positionals)

		if t.inner != "" && c.command != "" && len(positionals) > len(strings.Fields(c.command)) {
			c.inner = args[i+1:]

			return c, nil
		}
	}

	err := t.arguments(&c, positionals)

	return c, err
}

// arguments parses positional arguments: a subcommand and its arguments.
func (t tool) arguments(c *call, words []string) error {
	known := t.commands[c.command]
	if known == nil || c.command == "" && len(words) > 0 && len(t.commands) > 1 {
		return fmt.Errorf("unknown command %q", strings.Join(words, " "))
	}

	for _, argument := range words[len(strings.Fields(c.command)):] {
		c.add(known[""], argument)
	}

	return nil
}

// flag parses the flag at the start of args and returns how many of the following args it consumes.
func (t tool) flag(c *call, args []string) (int, error) {
	name, value, assigned := strings.Cut(args[0], "=")

	kind, err := t.kind(c.command, name)

	switch {
	case err != nil:
		return 0, err
	case kind == "" || assigned:
		c.add(kind, value)

		return 0, nil
	case len(args) == 1:
		return 0, fmt.Errorf("%s has no value", name)
	default:
		c.add(kind, args[1])

		return 1, nil
	}
}

// command returns the longest subcommand that words start with.
func (t tool) command(words []string) string {
	for n := min(len(words), 3); n > 0; n-- {
		if name := strings.Join(words[:n], " "); t.commands[name] != nil {
			return name
		}
	}

	return ""
}

func (t tool) kind(command, flag string) (string, error) {
	for _, known := range []flags{t.commands[command], t.global} {
		if kind, has := known[flag]; has {
			return kind, nil
		}
	}

	return "", fmt.Errorf("%s has no flag %s", strings.TrimSpace("command "+command), flag)
}

func (c *call) add(kind, value string) {
	switch kind {
	case readsFile:
		c.inputs = append(c.inputs, value)
	case makesFile:
		c.outputs = append(c.outputs, value)
	case takesPatch:
		c.patches = append(c.patches, value)
	}
}

// filters are commands that may be combined with talos-ccm in a line that is run. Their arguments are not checked.
var filters = set("cat echo grep head jq sort tail wc")

// others are commands of which only the name is checked.
var others = set("awk base64 cd chmod column cp cpio diff export ip less ls mkdir mv openssl rm sed sha256sum sha512sum tar test unsquashfs zstd")

func set(list string) map[string]bool {
	s := map[string]bool{}
	for word := range strings.FieldsSeq(list) {
		s[word] = true
	}

	return s
}

// tools are the programs and flags that the documentation uses, from the program's source or manual. Look up and add missing ones.
var tools = map[string]tool{
	"talosctl": { // siderolabs/talos, cmd/talosctl/cmd
		global: flagList("-n= --nodes= -e= --endpoints= -c= --cluster= --context= --talosconfig="),
		commands: map[string]flags{
			"apply-config":        flagList("-f< --file< -i --insecure --dry-run -p@ --config-patch@ -m= --mode= --timeout="),
			"config info":         flagList("-o= --output="),
			"config new":          flagList("--roles= --crt-ttl= >"),
			"containers":          flagList("-k --kubernetes"),
			"dmesg":               flagList("-f --follow --tail"),
			"edit machineconfig":  flagList("--dry-run -m= --mode="),
			"gen config":          flagList("--config-patch@ --config-patch-control-plane@ --config-patch-worker@ -o> --output> --install-image="),
			"get":                 flagList("--namespace= -o= --output= -w --watch -i --insecure"),
			"health":              flagList("--wait-timeout="),
			"image list":          flagList("--namespace="),
			"image talos-bundle":  flagList("--overlays= --extensions="),
			"kubeconfig":          flagList("-f --force >"),
			"list":                flagList("-l --long -r --recurse -d= --depth="),
			"logs":                flagList("-k --kubernetes -f --follow --tail="),
			"machineconfig patch": flagList("-p@ --patch@ -o> --output> <"),
			"memory":              flagList("-v --verbose"),
			"netstat":             flagList("-l --listening -t --tcp -p --programs"),
			"patch machineconfig": flagList("-p@ --patch@ --dry-run -m= --mode= --timeout="),
			"patch mc":            flagList("-p@ --patch@ --dry-run -m= --mode= --timeout="),
			"processes":           flagList("-s= --sort="),
			"read":                {},
			"reboot":              flagList("-m= --mode= --drain"),
			"shutdown":            flagList("--force"),
			"rollback":            {},
			"service":             {},
			"services":            {},
			"stats":               flagList("-k --kubernetes"),
			"time":                flagList("--check="),
			"upgrade":             flagList("-i= --image= -m= --reboot-mode= --drain --drain-timeout="),
			"validate":            flagList("-c< --config< -m= --mode= --strict"),
			"version":             flagList("--client --short"),
		},
	},
	"kubectl": { // kubernetes.io/docs/reference/kubectl
		global: flagList("-n= --namespace= --context= --kubeconfig="),
		commands: map[string]flags{
			"annotate":            flagList("--overwrite"),
			"apply":               flagList("-f< -k= --filename< -l= --selector= --server-side --force-conflicts --dry-run="),
			"auth can-i":          flagList("--as= --list"),
			"certificate approve": {},
			"certificate deny":    {},
			"config view":         flagList("--raw --minify -o= --output="),
			"create configmap":    flagList("--from-file< --from-literal= --dry-run= -o= --output="),
			"create token":        flagList("--duration= --audience="),
			"delete":              flagList("-f< --filename< -l= --selector= --ignore-not-found"),
			"diff":                flagList("-f< --filename<"),
			"drain":               flagList("--ignore-daemonsets --delete-emptydir-data"),
			"describe":            flagList("-l= --selector="),
			"events":              flagList("--for= -A --all-namespaces -w --watch --types="),
			"get":                 flagList("-o= --output= -A --all-namespaces -w --watch -l= --selector= --field-selector= --sort-by= --show-labels --show-managed-fields --raw= -L="),
			"label":               flagList("--overwrite"),
			"logs":                flagList("-f --follow --tail= -l= --selector= -c= --container= -p --previous"),
			"patch":               flagList("-p= --patch= --type= --subresource="),
			"rollout restart":     {},
			"rollout status":      flagList("--timeout="),
			"scale":               flagList("--replicas="),
			"taint":               flagList("--overwrite"),
			"version":             {},
			"wait":                flagList("--for= --timeout= --all"),
		},
	},
	"cosign": {commands: map[string]flags{ // docs.sigstore.dev
		"attest":             flagList("--key= --type= --predicate= --yes"),
		"generate-key-pair":  {},
		"sign":               flagList("--key= --yes --recursive"),
		"sign-blob":          flagList("--key= --yes --bundle= <"),
		"verify":             flagList("--key= --certificate-identity= --certificate-identity-regexp= --certificate-oidc-issuer="),
		"verify-attestation": flagList("--key= --type= --certificate-identity= --certificate-identity-regexp= --certificate-oidc-issuer="),
		"verify-blob":        flagList("--key= --bundle= --certificate-identity= --certificate-identity-regexp= --certificate-oidc-issuer="),
	}},
	"crane": { // google/go-containerregistry, cmd/crane/doc
		global: flagList("--insecure --platform= -v --verbose"),
		commands: map[string]flags{
			"append":         flagList("-b= --base= -f= --new_layer= -t= --new_tag= --oci-empty-base -o> --output>"),
			"config":         {},
			"copy":           flagList("-a --all-tags -n --no-clobber"),
			"digest":         flagList("--full-ref --tarball="),
			"export":         {},
			"index append":   flagList("-m= --manifest= -t= --tag= --flatten"),
			"manifest":       {},
			"pull":           flagList("--format="),
			"push":           flagList("--index --image-refs>"),
			"registry serve": flagList("--address= --disk="),
		},
	},
	"docker": { // docs.docker.com/reference/cli; what it runs is Talos's imager
		commands: map[string]flags{
			"buildx build": flagList("-f< --file< --target= --platform= --provenance= --sbom= -t= --tag= --push --build-arg="),
			"run":          flagList("--rm -i -t -v= --volume= --privileged"),
		},
		inner: "imager",
	},
	"gh": {commands: map[string]flags{ // cli.github.com/manual
		"attestation verify": flagList("--repo= -R= --owner="),
		"release download":   flagList("--repo= -R= --pattern= -p="),
	}},
	"go": {commands: map[string]flags{ // go help
		"build":        flagList("-o> -tags= -ldflags= -trimpath"),
		"get":          flagList("-tool"),
		"install":      {},
		"list":         flagList("-m -f= -u"),
		"mod download": {},
		"mod tidy":     {},
		"mod verify":   {},
		"run":          {},
		"test":         flagList("-race -v -run= -count= -tags= -bench= -fuzz= -fuzztime= -timeout= -p= -cpuprofile= -memprofile="),
		"tool pprof":   flagList("-http="),
		"vet":          {},
		"version":      flagList("-m"),
	}},
	"helm": {commands: map[string]flags{ // helm.sh/docs/helm
		"get values": flagList("-n= --namespace= -o="),
		"list":       flagList("-n= --namespace= -A"),
		"upgrade":    flagList("-i --install -n= --namespace= -f< --values< --set= --version= --take-ownership"),
		"uninstall":  flagList("-n= --namespace= --wait"),
	}},
	"imager": { // siderolabs/talos, cmd/installer/cmd/imager
		commands: map[string]flags{"": flagList("--platform= --arch= --base-installer-image= --image-cache= --insecure --extra-kernel-arg= --meta= --system-extension-image= " +
			"--output= --output-kind= --tar-to-stdout --overlay-name= --overlay-image= --overlay-option= --embedded-config-path=")},
	},
	"curl": {commands: map[string]flags{ // curl.se/docs/manpage.html
		"": flagList("-f --fail -s --silent -S -sS -fsSL -fsS -L --location -k --insecure -H= --header= -o> --output> -X= --request= --data-binary= --cacert= --data-binary="),
	}},
	"tee": {commands: map[string]flags{"": flagList("-a >")}},
	"git": {commands: map[string]flags{ // git-scm.com/docs
		"clone":    flagList("--depth= --branch="),
		"checkout": flagList("-b="),
		"commit":   flagList("-s --signoff -m= --message= --amend"),
		"describe": flagList("--tags"),
		"push":     {},
		"tag":      flagList("-a -s -m= --message="),
	}},
}
