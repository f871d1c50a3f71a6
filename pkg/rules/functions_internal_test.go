package rules

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"github.com/Masterminds/sprig/v3"
	"github.com/siderolabs/talos/pkg/machinery/resources/hardware"
	"github.com/siderolabs/talos/pkg/machinery/resources/runtime"
)

// keptOut are sprig's functions that templates cannot call, by the reason. A new version's functions must be put here or let in.
var keptOut = map[string][]string{
	"environment, files, network": {"env", "expandenv", "getHostByName", "osBase", "osClean", "osDir", "osExt", "osIsAbs"},
	"chance":                      {"randAlpha", "randAlphaNum", "randAscii", "randBytes", "randInt", "randNumeric", "shuffle", "uuidv4"},
	"secrets and certificates": {
		"bcrypt", "buildCustomCert", "decryptAES", "derivePassword", "encryptAES", "genCA", "genCAWithKey", "genPrivateKey", "genSelfSignedCert", "genSelfSignedCertWithKey",
		"genSignedCert", "genSignedCertWithKey", "htpasswd",
	},
	"more than its arguments make": {"seq", "until", "untilStep", "toPrettyJson", "mustToPrettyJson", "wrapWith", "chunk", "mustChunk"},
	"changes its arguments":        {"set", "unset", "merge", "mergeOverwrite", "mustMerge", "mustMergeOverwrite"},
	"no order":                     {"values"},
	"hides text/template's, which the upstream Talos CCM has": {"slice", "mustSlice"},
	"time": {
		"ago", "date", "dateInZone", "dateModify", "date_in_zone", "date_modify", "duration", "durationRound", "htmlDate", "htmlDateInZone", "mustDateModify", "mustToDate",
		"must_date_modify", "now", "toDate", "unixEpoch",
	},
	"the plain name is as strict": {
		"mustAppend", "mustCompact", "mustDeepCopy", "mustFirst", "mustFromJson", "mustHas", "mustInitial", "mustLast", "mustPrepend", "mustPush", "mustRegexFind",
		"mustRegexFindAll", "mustRegexMatch", "mustRegexReplaceAll", "mustRegexReplaceAllLiteral", "mustRegexSplit", "mustRest", "mustReverse", "mustToJson",
		"mustToRawJson", "mustUniq", "mustWithout",
	},
	"another name for the same": {"biggest", "push", "trimall", "tuple", "toStrings", "typeIs", "typeIsLike", "typeOf"},
	"of no use here":            {"hello", "deepCopy", "omit", "pick", "pluck", "urlJoin", "toDecimal", "add1f", "addf", "divf", "maxf", "minf", "mulf", "subf"},
}

func TestEveryFunctionOfSprigIsDecidedOn(t *testing.T) {
	decided := map[string]bool{}

	for name := range functions {
		decided[name] = true
	}

	for why, names := range keptOut {
		for _, name := range names {
			if decided[name] {
				t.Errorf("%s is let in, or kept out twice (%s)", name, why)
			}

			decided[name] = true
		}
	}

	for _, name := range slices.Sorted(maps.Keys(sprig.TxtFuncMap())) {
		if !decided[name] {
			t.Errorf("%s is neither let in nor kept out", name)
		}
	}
}

func TestNothingIsLetInThatSprigDoesNotHave(t *testing.T) {
	available := sprig.TxtFuncMap()

	for name := range fromSprig {
		if available[name] == nil {
			t.Errorf("there is no %s", name)
		}

		if own[name] != nil || builtins[name] != nil || strict[name] != "" {
			t.Errorf("%s is on two lists", name)
		}
	}
}

func TestEveryFieldOfTheResourcesIsAVariableAndCanBeSelected(t *testing.T) {
	for _, resource := range []reflect.Type{reflect.TypeFor[runtime.PlatformMetadataSpec](), reflect.TypeFor[hardware.SystemInformationSpec]()} {
		for _, field := range reflect.VisibleFields(resource) {
			if _, exists := variables[field.Name]; !exists {
				t.Errorf("there is no variable .%s", field.Name)
			}

			if _, err := (plainKeys{}).find(field.Name); err != nil && field.Name != "Tags" {
				t.Error(err)
			}
		}
	}
}
